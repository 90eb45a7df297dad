"""The origin of files: inputs and outputs of runs, preparations and exports, with digests."""
