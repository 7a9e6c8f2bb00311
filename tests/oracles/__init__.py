"""Float64 oracles the tests compare with."""
