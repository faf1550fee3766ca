from tests.platform.control.conftest import stand

__all__ = ["stand"]
