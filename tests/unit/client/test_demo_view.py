from __future__ import annotations

from octavo_client.cli._demo_view import DemoState, DemoStream, screen_svg


def test_panels_count_tokens_and_say_the_reason() -> None:
    """A panel's foot has its count, in the right number, and then why the stream ended."""
    one, many = DemoStream("one"), DemoStream("many")
    one.add(0, "a", 1)
    many.add(0, "b", 29)
    many.finish("stop", "")
    picture = screen_svg(DemoState([one, many])).replace("&#160;", " ")
    assert " 1 token " in picture
    assert " 29 tokens · stop " in picture
