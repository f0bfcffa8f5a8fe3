"""The main job, a sweep of LoRA configurations on one base model, done in all the ways that people do it."""
