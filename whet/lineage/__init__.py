"""The origin of files: what a run, a preparation or an export read and made, with digests."""
