"""What `helm test` runs: the gateway is healthy and gives a token, or wants a key."""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

URL, KEY = os.environ["URL"], os.environ.get("OCTAVO_API_KEY")
TLS = ssl.create_default_context()
if os.environ["VERIFY"] == "no":
    TLS.check_hostname, TLS.verify_mode = False, ssl.CERT_NONE


def say(*words):
    """Write a line for the test's log."""
    sys.stdout.write(" ".join(str(word) for word in words) + "\n")


def ask(path, body=None):
    """Give status and text of an answer, whatever it is."""
    headers = {"content-type": "application/json"}
    if KEY:
        headers["authorization"] = f"Bearer {KEY}"
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(URL + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=120, context=TLS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


give_up = time.monotonic() + 60
while True:
    try:
        status, text = ask("/health")
    except urllib.error.URLError as error:
        status, text = 0, str(error.reason)
    if status == 200 or time.monotonic() > give_up:
        break
    time.sleep(2)
say("health:", status)
assert status == 200, text

prompt = {"model": os.environ["MODEL"], "prompt": "One, two,", "max_tokens": 1, "temperature": 0}
status, text = ask("/v1/completions", prompt)
say("generate:", status)
if os.environ["NEEDS_KEY"] == "yes":
    assert status == 401, f"keys are set, and a call without one gave {status}: {text}"
    say("refused without a key, as it should be; set helmTest.apiKeySecret to generate")
else:
    assert status == 200, text
    assert json.loads(text)["usage"]["completion_tokens"] == 1, text
    say("one token came")
