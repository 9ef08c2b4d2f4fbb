"""Put a plan on a live module. `apply` shows every step in order; each family has a folder."""
