"""What a kernel costs: work, resources, the clocks of each unit. Below selection, tuning and explain."""
