"""What Numba has no word for, written in LLVM: pointers, vectors and what is made of them."""
