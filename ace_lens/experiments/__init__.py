"""The paper's experiments, one module each, written with the names that a user of the library has."""
