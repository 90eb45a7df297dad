"""A live page of runs: ``whet watch``."""
