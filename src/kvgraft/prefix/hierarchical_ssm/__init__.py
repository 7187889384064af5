"""The cache of two tiers of hybrid models: tokens and states that leave the device live on in host memory, each by itself."""
