"""KV events: what is stored and removed, on the wire and over ZMQ as vLLM and SGLang send it."""
