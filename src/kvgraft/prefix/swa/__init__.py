"""The cache for models with sliding windows: one tree, two pools."""
