"""vLLM behind `flowrt.engines.server`. `in_server` runs in vLLM's own environment."""
