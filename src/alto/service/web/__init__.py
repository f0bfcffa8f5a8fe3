"""HTTP checks and limits that every request passes before it is answered."""
