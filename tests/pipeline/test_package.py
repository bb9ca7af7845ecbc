import nanopar_pipeline


def test_the_package_says_what_it_will_hold() -> None:
    assert nanopar_pipeline.__doc__
    assert nanopar_pipeline.__all__ == []
