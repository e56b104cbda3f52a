"""How observations are stored: :mod:`.observation_store` on top of :mod:`.frame_store` on top of :mod:`.arena`."""
