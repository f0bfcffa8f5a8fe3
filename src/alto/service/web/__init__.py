"""HTTP: what every request passes before it is answered."""
