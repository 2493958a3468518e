"""iGSM: synthetic grade-school mathematics with an exact number of operations (docs/igsm.md)."""
