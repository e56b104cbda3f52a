"""The parts of a run: each module measures one kind of thing and returns a table."""
