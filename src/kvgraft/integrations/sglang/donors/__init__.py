"""Where the K/V of donors lie in SGLang's pool and in host memory, how they are copied, and what becomes one."""
