"""What a kernel costs: its work, its resources, the clocks of each unit. Below selection, tuning and explain."""
