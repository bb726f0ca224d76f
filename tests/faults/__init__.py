"""Plants faults in real runs and checks that each survives them and says nothing that is not so: `make faults`."""
