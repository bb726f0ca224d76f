from workloads.recsys.text import build_vocabulary, item_text, pad_rows, user_text, words


def test_sentences():
    assert user_text(25, "F", "writer") == "female, age group 25, writer"
    assert item_text("Heat", 1995, ["Action", "Crime"]) == "Heat, 1990s. Action, Crime"
    assert item_text("Heat", None, []) == "Heat. "


def test_words_keep_letters_of_any_language_and_drop_punctuation():
    assert words("Misérables, Les: Children's Film-Noir (1990s) _x_") == [
        "misérables", "les", "children's", "film-noir", "1990s", "x",
    ]  # fmt: skip


def test_vocabulary_goes_by_frequency_then_alphabet_and_keeps_two_ids_free():
    assert build_vocabulary(["b a", "c a"]) == {"a": 2, "b": 3, "c": 4}
    assert build_vocabulary(["c b a", "a"], max_words=2) == {"a": 2, "b": 3}


def test_rows_are_padded_cut_and_never_empty():
    ids, lengths = pad_rows([[5, 6, 7, 8], [9], []], max_tokens=3, pad_id=1)
    assert ids.tolist() == [[5, 6, 7], [9, 1, 1], [1, 1, 1]]
    assert lengths.tolist() == [3, 1, 1]
