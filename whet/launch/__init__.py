"""Commands that run as jobs elsewhere: profiles of places, scripts and manifests, and the schedulers that take them."""
