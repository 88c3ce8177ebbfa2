"""Jobs of several processes: starting them on one host, and joining them."""
