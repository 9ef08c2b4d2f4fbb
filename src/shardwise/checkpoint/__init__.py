"""Save and load training state as safetensors shards and one JSON manifest. No pickle."""
