"""What Holter costs, measured: each file is a command that prints its figures."""
