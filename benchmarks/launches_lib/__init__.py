"""What a launch of a Triton kernel costs in Python, measured without a GPU."""
