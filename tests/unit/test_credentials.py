import pytest

from pipelines.credentials import censored, without_credentials
from pipelines.tracking import how_to_browse


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("https://user:hunter2@host/path?token=hunter2", "https://host/path?token=***"),
        ("https://hunter2@host:5000", "https://host:5000"),
        ("https://user:hun/ter2@host/path", "https://host/path"),
        ("https://user:hun?ter2@host/path", "https://host/path"),
        ("https://user:hun#ter2@host", "https://host"),
        ("https://user:hun@ter2@host", "https://host"),
        ("https://user?hunter2@host", "https://user?***"),
        ("https://host/path?to=a@b&hunter2", "https://host/path?to=***&***"),
        ("https://host:5000/path?to=a@b", "https://host:5000/path?to=***"),
        ("postgresql://user:hunter2@host/db", "postgresql://host/db"),
        ("sqlite:////home/me@work/mlflow.db", "sqlite:////home/me@work/mlflow.db"),
        ("file:///tmp/x?", "file:///tmp/x?"),
        ("runs/mlflow.db", "runs/mlflow.db"),
    ],
)
def test_an_address_is_shown_without_user_password_and_query_values(uri, shown):
    assert without_credentials(uri) == shown
    assert without_credentials(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "cannot reach https://user:hun/ter2%21@host",
        "Max retries exceeded with url: /ter2!@host/api",
        "bad port 'hun'",
        "no header Basic hun/ter2!",
        "path hun%2Fter2%21 and token s3cret",
    ],
)
def test_a_message_that_repeats_parts_of_an_address_shows_no_secret(text):
    shown = censored(text, "https://user:hun/ter2!@host/x?token=s3cret")
    assert not any(secret in shown for secret in ("hun", "ter2", "s3cret"))
    assert "***" in shown


def test_a_message_about_an_address_without_secrets_stays_as_it_is():
    assert censored("cannot reach http://host:5000/x", "http://host:5000/x") == "cannot reach http://host:5000/x"


def test_the_command_that_serves_a_database_serves_this_machine_only():
    assert how_to_browse("sqlite:////runs/mlflow.db").startswith("mlflow ui --host 127.0.0.1 --backend-store-uri ")
    assert how_to_browse("http://user:hunter2@host") == "http://host"
