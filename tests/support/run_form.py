"""The form of Prefect's "Custom run": its fields by the paths of their parameters.

Knows the form's controls (3.9.1); does not know which parameters there are.
"""

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin

from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import Locator, Response
from screen import Screen

# Gives every field a data-path (its parameter's path) and returns what each one shows. Labels are made from
# the parameters' names: "Top K (Optional)" is top_k.
_READ_FORM = """() => Array.from(document.querySelectorAll('.schema-form-property'), field => {
  const header = name => field.querySelector(`:scope > .p-label__header ${name}`)?.innerText.trim() ?? ''
  const label = header('.schema-form-property__label')
  const name = label.replace(/ \\(Optional\\)$/, '').toLowerCase().replaceAll(' ', '_')
  const parent = field.parentElement.closest('.schema-form-property')
  field.dataset.path = parent ? `${parent.dataset.path}.${name}` : name
  const body = field.querySelector(':scope > .p-label__body')
  const texts = (selector, read) => Array.from(body.querySelectorAll(selector), read)
  let shown = []
  if (body.querySelector('.schema-form-property')) shown = []
  else if (body.querySelector('.p-tag'))
    shown = texts('.p-tag', e => e.innerText.trim()).filter(text => !text.startsWith('+'))
  else if (body.querySelector('.p-select-button'))
    shown = texts('.p-select-button__value', e => e.innerText.trim())
  else if (body.querySelector('[role=switch]')) shown = texts('[role=switch]', e => e.ariaChecked)
  else if (body.querySelector('.schema-form-property-null')) shown = ['None']
  else shown = texts('input, textarea', e => e.value)
  return {path: field.dataset.path, label, description: header('.schema-form-property__description'), shown}
})"""

_ERRORS = ".p-label__message--failed, .schema-form-property-array-item__error, .p-toast__message"


class FormRefused(Exception):
    """The form, or the server behind it, did not take the parameters; the message is what was shown."""


@dataclass(frozen=True, slots=True)
class FormField:
    """One field; `path` is its parameter's, such as parameters.lanes.short.concurrency."""

    path: str
    label: str
    description: str
    shown: list[str]  # its value; a value for each item of a list; nothing for a section


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a form that was submitted."""

    run_id: str | None  # none: refused


class RunForm:
    """The form that is on the screen."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._page = screen.page
        self._page.locator(".schema-form-property").first.wait_for()
        screen.settle()

    def read(self) -> list[FormField]:
        """Every field and section from top to bottom."""
        self._screen.settle()  # a control shows a new value a moment later
        return self._read_now()

    def set_run_name(self, name: str) -> None:
        """Replace the name that the form made up; a flow with a flow_run_name takes that one instead."""
        self._page.locator(".flow-run-name-input input").fill(name)

    def set(self, path: str, value: Any) -> None:
        """Set one field by its own control: text, number, switch, dropdown, or a list's items."""
        body = self.show(path).locator(":scope > .p-label__body")
        types = body.locator(":scope > .p-button-group").get_by_role("button")
        if types.count():  # one for each type that the value may have, None last
            (types.last if value is None else types.first).click()
            body = self.show(path).locator(":scope > .p-label__body")  # it is another element now
        if value is None:
            return
        if body.locator("[role=switch]").count():
            self._turn(body.locator("[role=switch]"), value)
        elif body.locator(".p-select-button").count():
            self._choose(body, value)
        elif body.locator(".p-draggable-list").count():
            self._fill_list(body.locator(".p-draggable-list"), value)
        else:
            self._fill(body, value)

    def set_json(self, path: str, value: Any) -> None:
        """Set a field or a whole section by "Use JSON input" of its menu."""
        field = self.show(path)
        field.locator(".schema-form-property-menu button").first.click()
        self._screen.pick_from_menu("Use JSON input")
        section = field.locator(".schema-form-property")
        self._screen.wait(f"{path} as JSON", lambda: section.count() == 0, reload=False)
        self._fill(field.locator(".schema-form-property-kind-json"), value)

    def set_all_json(self, values: dict[str, Any]) -> None:
        """Set the whole form by "Use JSON input" of its menu."""
        form = self._page.locator(".schema-input")
        form.locator(".flow-run-create-form-v2__header button").click()
        self._screen.pick_from_menu("Use JSON input")
        field = form.locator(".schema-form-property")
        self._screen.wait("the form as JSON", lambda: field.count() == 0, reload=False)
        self._fill(form.locator(".p-code-input").locator(".."), values)

    def show(self, path: str) -> Locator:
        """Scroll the field to the middle of the screen."""
        paths = [field.path for field in self._read_now()]
        if path not in paths:
            raise KeyError(f"the form has no field {path!r}, only {paths}")
        field = self._page.locator(f'[data-path="{path}"]')
        field.evaluate("field => field.scrollIntoView({block: 'center'})")
        return field

    def submit(self) -> str:
        """Submit the form and go to the page of the run that it made; its id.

        Raises:
            FormRefused: an error was shown instead.
        """
        self._wait_for_no_toast()
        answers: list[Response] = []
        self._page.on("response", lambda answer: answers.append(answer) if _is_verdict(answer) else None)
        self._page.get_by_role("button", name="Submit", exact=True).click()
        verdict = self._screen.wait("the form's answer", lambda: _decide(answers), reload=False)
        if verdict.run_id is None:
            self._screen.wait("an error", self._errors, reload=False)
            self._screen.settle()
            raise FormRefused("\n".join(self._errors()))
        try:
            self._page.get_by_text("View run", exact=True).last.click(timeout=10_000)
        except PlaywrightError:  # the toast that offers it is gone after some seconds
            self._page.goto(urljoin(self._page.url, f"/runs/flow-run/{verdict.run_id}"))
        self._page.wait_for_url(f"**/runs/flow-run/{verdict.run_id}**")
        return verdict.run_id

    def _read_now(self) -> list[FormField]:
        return [FormField(**field) for field in self._page.evaluate(_READ_FORM)]

    def _turn(self, switch: Locator, value: bool) -> None:
        if (switch.get_attribute("aria-checked") == "true") != value:
            switch.click()

    def _choose(self, body: Locator, value: str | list[str]) -> None:
        # A click on the text opens the options and closes them again; one on the arrow only opens them.
        arrow = body.locator(".p-select-button__icon")
        arrow.click(force=True)
        options = self._page.get_by_role("option")
        options.first.wait_for()
        offered = {option.inner_text().strip(): option for option in options.all()}
        chosen = {name for name, option in offered.items() if "--selected" in option.get_attribute("class")}
        many = isinstance(value, list)
        wanted = set(value) if many else {value}
        if not wanted <= offered.keys():
            raise KeyError(f"{value!r} is not offered, only {list(offered)}")
        to_click = wanted ^ chosen if many else wanted - chosen
        for name in to_click:
            offered[name].click()
        if many or not to_click:  # else they close by themselves
            arrow.click(force=True)
        self._screen.wait("closed options", lambda: options.count() == 0, reload=False)

    def _fill_list(self, items: Locator, values: list[Any]) -> None:
        item = items.locator(".p-draggable-list__item")
        while item.count():
            left = item.count() - 1
            item.last.locator(".schema-form-property-array-item__control > button").click()
            self._screen.wait("the shorter list", lambda left=left: item.count() == left, reload=False)
        for index, value in enumerate(values):
            items.get_by_role("button", name="Add item", exact=True).click()
            item.nth(index).wait_for()
            self._fill(item.nth(index), value)

    def _fill(self, within: Locator, value: Any) -> None:
        if within.locator(".p-code-input").count():
            value = json.dumps(value, indent=2)
        within.locator("input, textarea").fill(str(value))

    def _errors(self) -> list[str]:
        """The messages at the fields and those that pop up (each of these is on the page twice)."""
        shown = self._page.locator(_ERRORS).filter(visible=True)
        texts = [text.strip() for text in shown.all_inner_texts()]
        return list(dict.fromkeys(text for text in texts if text and "View run" not in text))

    def _wait_for_no_toast(self) -> None:
        """They lie on Submit, and go after 5 s unless the mouse is on them."""
        self._page.mouse.move(0, 0)
        toasts = self._page.locator(".p-toast__card")
        self._screen.wait("no toast", lambda: toasts.count() == 0, reload=False)


def _is_verdict(answer: Response) -> bool:
    return answer.request.method == "POST" and answer.url.endswith(("/schemas/validate", "/create_flow_run"))


def _decide(answers: list[Response]) -> Verdict | None:
    """The form asks whether the parameters are valid, and only then for the run."""
    for answer in answers:
        if answer.url.endswith("/create_flow_run"):
            return Verdict(answer.json()["id"] if answer.ok else None)
        if not answer.json()["valid"]:
            return Verdict(None)
    return None
