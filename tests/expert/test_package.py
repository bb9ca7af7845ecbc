import nanopar_expert


def test_the_package_says_what_it_will_hold() -> None:
    assert nanopar_expert.__doc__
    assert nanopar_expert.__all__ == []
