"""Packages next door that use our buffers, each installed for real in an environment of its own: `make test-more`."""
