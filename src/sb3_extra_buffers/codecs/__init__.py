"""Compression methods: one file each, the contract in :mod:`.base`, the names in :mod:`.registry`."""
