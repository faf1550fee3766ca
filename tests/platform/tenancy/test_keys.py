from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loraplex_platform.tenancy import keys
from pydantic import SecretStr

PEPPER = SecretStr("pepper-for-tests-0123456789abcdefgh")
BASE62 = string.ascii_letters + string.digits


def test_a_minted_key_has_the_documented_form_and_parses() -> None:
    minted = keys.mint("sk")

    prefix, kind, public_id, secret, checksum = minted.secret.split("_")

    assert (prefix, kind) == ("lpx", "sk")
    assert (len(public_id), len(secret), len(checksum)) == (12, 40, 6)
    assert keys.parse(minted.secret) == keys.ParsedKey("sk", minted.public_id)
    assert minted.last4 == minted.secret[-4:]
    assert minted.secret not in repr(minted)


def test_admin_keys_are_another_kind() -> None:
    assert keys.parse(keys.mint("ak").secret).kind == "ak"


def test_keys_do_not_repeat() -> None:
    assert len({keys.mint().secret for _ in range(200)}) == 200


@given(position=st.integers(0, 66), letter=st.sampled_from(BASE62 + "_ "))
def test_one_wrong_character_is_noticed_without_the_database(position: int, letter: str) -> None:
    secret = keys.mint().secret
    position %= len(secret)
    typo = secret[:position] + letter + secret[position + 1 :]

    if typo == secret:
        keys.parse(typo)
    else:
        with pytest.raises(keys.MalformedKeyError):
            keys.parse(typo)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sk-1234",
        "lpx_sk_",
        "' or 1=1 --",
        "lpx_sk_" + "a" * 12 + "_" + "b" * 40 + "_000000",
        # Named, as a key is another one each time, and pytest's workers must agree on a test's name.
        pytest.param("lpx_zz_" + keys.mint().secret[7:], id="kind"),
        pytest.param(keys.mint().secret + "\n", id="newline"),
        pytest.param(keys.mint().secret + "0", id="longer"),
        pytest.param(keys.mint().secret.replace("_", "＿"), id="wide"),
        "é" * 67,
    ],
)
def test_anything_else_is_malformed(text: str) -> None:
    with pytest.raises(keys.MalformedKeyError):
        keys.parse(text)


@given(st.text())
def test_no_text_makes_the_parser_fail_otherwise(text: str) -> None:
    try:
        keys.parse(text)
    except keys.MalformedKeyError:
        return
    pytest.fail("a random text passed for a key")


def test_only_the_whole_secret_under_the_same_pepper_is_valid() -> None:
    minted = keys.mint()
    stored = keys.mac(PEPPER, minted.secret)

    assert len(stored) == 32
    assert keys.is_valid(PEPPER, minted.secret, stored)
    assert not keys.is_valid(PEPPER, keys.mint().secret, stored)
    assert not keys.is_valid(
        SecretStr("another pepper 0123456789abcdefghij"), minted.secret, stored
    )
    # Pass-the-hash: what the table holds is not a credential.
    assert not keys.is_valid(PEPPER, stored.hex(), stored)


def test_is_same_secret_compares_whole_keys() -> None:
    admin = keys.mint("ak").secret

    assert keys.is_same_secret(PEPPER, admin, SecretStr(admin))
    assert not keys.is_same_secret(PEPPER, admin[:-1], SecretStr(admin))
    assert not keys.is_same_secret(PEPPER, "", SecretStr(admin))
