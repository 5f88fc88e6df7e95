"""vLLM behind the engine protocol; the only package that imports vllm."""
