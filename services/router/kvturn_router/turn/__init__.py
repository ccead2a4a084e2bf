"""The life of a turn: its legs to the engines, and the answer on its way back."""
