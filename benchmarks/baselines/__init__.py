"""What users do today: the baselines and peers that ALTO is measured against."""
