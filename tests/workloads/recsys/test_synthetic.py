import numpy as np

from workloads.recsys.synthetic import synthetic_interactions


def test_equal_seeds_give_equal_sets_and_others_do_not():
    one, same, other = (synthetic_interactions(0.02, seed) for seed in (0, 0, 1))
    for name in ("users", "items", "ratings", "times"):
        assert np.array_equal(getattr(one, name), getattr(same, name))
    assert (one.user_texts, one.item_texts) == (same.user_texts, same.item_texts)
    assert one.item_texts != other.item_texts


def test_nobody_rates_a_film_twice_and_everyone_can_be_evaluated():
    made = synthetic_interactions(0.02, 0)
    pairs = made.users * len(made.item_texts) + made.items
    assert len(np.unique(pairs)) == len(pairs)
    assert np.bincount(made.users).min() >= 3
    assert set(made.ratings) <= {1, 2, 3, 4, 5}


def test_taste_shows_in_the_metadata():
    """Users of one occupation agree on genres more than chance: the spread of genre shares between occupations."""
    made = synthetic_interactions(0.1, 0)
    jobs, job_N = np.unique([text.split(", ")[2] for text in made.user_texts], return_inverse=True)
    genres, genre_N = np.unique([text.split(". ")[1].split(", ")[0] for text in made.item_texts], return_inverse=True)

    def spread(job_of_user: np.ndarray) -> float:
        table = np.zeros((len(jobs), len(genres)))
        np.add.at(table, (job_of_user[made.users], genre_N[made.items]), 1)
        return float((table / table.sum(1, keepdims=True)).std(0).mean())

    shuffled = np.random.default_rng(0).permutation(job_N)
    assert spread(job_N) > 1.5 * spread(shuffled)
