"""The cache of two tiers: what leaves the device lives on in host memory."""
