import nanopar_tensor


def test_the_package_says_what_it_will_hold() -> None:
    assert nanopar_tensor.__doc__
    assert nanopar_tensor.__all__ == []
