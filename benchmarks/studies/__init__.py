"""Questions of their own, each answered by one program: python -m benchmarks.studies.NAME."""
