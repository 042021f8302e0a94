"""Compare a vector of each whole document with the teacher's."""
