"""The sections of a run. Each module measures one topic and returns tables."""
