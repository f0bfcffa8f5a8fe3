"""Compares with TRL which tokens are trained under chat templates."""
