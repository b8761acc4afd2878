"""What a kernel is: configurations of each family and direction, traits, names, sets, devices."""
