"""Everything between the core and an answer: data, networks, recipes, training, evaluation, export."""
