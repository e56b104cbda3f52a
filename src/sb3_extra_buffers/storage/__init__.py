"""How observations are kept: :mod:`.observation_store` on :mod:`.frame_store` on :mod:`.arena`."""
