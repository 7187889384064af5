"""What is loaded for a prompt, and when: what SGLang can load, agreed by all ranks, chunk by chunk. Copies nothing."""
