"""What people hold in their hands: the command, the doctor, benchmarks, sizes, and warming up."""
