"""An office: the tables at the end are graded, in any order; doing nothing earns nothing, also where nothing is to be
done; the files of WorkBench load, and their right calls score 1."""

import asyncio
import csv
import inspect
import os
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.test_tool_tasks import played
from whet.base.errors import DataError
from whet.core.types import Task
from whet.tasks.tools.base import solution
from whet.tasks.tools.office import OfficeTasks
from whet.tasks.tools.office_tools import TABLES, Office
from whet.tasks.validate import validate, wrong
from whet.tools.tool import ToolError, tools_of

OFFICE = OfficeTasks(offices=4, train_size=120, test_size=20)
TASKS = OFFICE.tasks("train")
QUIET = next(task for task in TASKS if not task.data.calls)
BUSY = next(task for task in TASKS if len(task.data.calls) > 1)


def earned(task: Task, *calls: tuple[str, dict[str, Any]]) -> float:
    return played(OFFICE, task, solution(*calls, answer="Done."))[-1].reward


def test_right_answers_earn_1_and_silence_nothing() -> None:
    assert wrong(asyncio.run(validate(OFFICE, 120))) == []


def test_the_tools_equal_the_tools_of_workbench() -> None:
    tools = tools_of(Office({table: [] for table in TABLES}))
    assert len(tools) == 27
    assert all(tool.name.startswith((*TABLES, "company_directory")) for tool in tools)


def test_doing_nothing_earns_nothing_also_where_nothing_is_to_be_done() -> None:
    (table,) = QUIET.data.tables
    assert earned(QUIET) == 0
    assert earned(QUIET, ("company_directory_find_email_address", {"name": "nia"})) == 0  # not the table in question
    other = "calendar_search_events" if table != "calendar" else "email_search_emails"
    assert earned(QUIET, (other, {})) == 0
    assert played(OFFICE, QUIET, OFFICE.gold(QUIET))[-1].reward == 1


def test_a_failed_read_does_not_count_as_reading() -> None:
    reads = {
        "email": ("email_get_email_information_by_id", {"email_id": "x", "field": "body"}),
        "calendar": ("calendar_get_event_information_by_id", {"event_id": "x", "field": "duration"}),
        "project_management": ("project_management_get_task_information_by_id", {"task_id": "x", "field": "board"}),
        "customer_relationship_manager": ("customer_relationship_manager_search_customers", {"unknown": "x"}),
    }
    assert earned(QUIET, reads[QUIET.data.tables[0]]) == 0


def test_the_order_of_calls_does_not_count_but_each_call_does() -> None:
    calls = [tuple(call) for call in BUSY.data.calls]
    assert earned(BUSY, *calls) == earned(BUSY, *reversed(calls)) == 1
    assert earned(BUSY, *calls[1:]) == 0
    assert earned(BUSY, *calls, ("email_send_email", {"recipient": "a@b.c", "subject": "x", "body": "y"})) == 0


def office() -> Office:
    return Office(OFFICE._offices[0])


def test_ids_of_new_rows_and_the_order_of_rows_do_not_count_but_texts_do() -> None:
    one, other, different = office(), office(), office()
    one.email_send_email("a@b.c", "First", "x")
    one.email_send_email("a@b.c", "Second", "x")
    other.email_send_email("A@b.c", "second", "x")
    other.email_send_email("a@b.c", "first ", "x")
    assert one._content() == other._content()
    different.email_send_email("a@b.c", "First", "x")
    different.email_send_email("a@b.c", "First", "x")
    assert one._content() != different._content()


def test_deleting_another_row_that_reads_the_same_is_not_the_same() -> None:
    tables = {table: [] for table in TABLES} | {"email": [{"email_id": own, "subject": "x"} for own in ("1", "2")]}
    one, other = Office(tables), Office(tables)
    one.email_delete_email("1")
    other.email_delete_email("2")
    assert one._content() != other._content()


def test_episodes_do_not_see_each_other() -> None:
    first = office()
    first.email_delete_email("00000000")
    with pytest.raises(ToolError, match="there is no email_id '00000000'"):
        first.email_delete_email("00000000")
    office().email_delete_email("00000000")


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (
            lambda office: office.project_management_update_task("00000000", "list_name", "Doing"),
            "list_name must be one of",
        ),
        (
            lambda office: office.customer_relationship_manager_update_customer("00000000", "status", "new"),
            "status must be",
        ),
        (
            lambda office: office.project_management_update_task("00000000", "assigned_to_email", "x@y.z"),
            "not an address of the company directory",
        ),
        (lambda office: office.calendar_delete_event("77"), "there is no event_id '77'"),
        (lambda office: office.email_send_email("nia", "a", "b"), "'nia' is not an address"),
    ],
)
def test_a_call_with_wrong_values_is_an_error_and_changes_nothing(call: Any, why: str) -> None:
    one = office()
    with pytest.raises(ToolError, match=why):
        call(one)
    assert one._content() == office()._content()


def test_every_tool_can_be_called() -> None:
    made = {"email_id": "00000000", "event_id": "00000001", "task_id": "00000002", "customer_id": "00000003",
            "recipient": "a@b.c", "duration": 30, "plot_type": "bar", "value_to_plot": "total_visits", "status": "Lead",
            "list_name": "Backlog", "board": "Design", "assigned_to_email": "nia.johnson@atlas.com",
            "traffic_source": "direct"}  # fmt: skip
    fields = {"email": "body", "calendar": "event_name", "project_management": "task_name", "customer": "notes"}
    for tool in tools_of(office()):
        one = office()
        method = getattr(one, tool.name)
        field = next((value for name, value in fields.items() if tool.name.startswith(name)), None)
        arguments = {
            name: field if name == "field" else made.get(name, "x")
            for name, parameter in inspect.signature(method).parameters.items()
            if parameter.default is parameter.empty
        }
        method(**arguments)
        changes = any(word in tool.name for word in ("create", "delete", "update", "send", "reply", "forward", "add_"))
        assert (one._content() != office()._content()) == changes, tool.name


def published(folder: Path, answer: str) -> Path:
    rows = {
        "emails": {"email_id": "1", "inbox/outbox": "inbox", "sender/recipient": "nia@atlas.com", "subject": "s",
                   "sent_datetime": "2023-11-01 09:00:00", "body": "b"},
        "calendar_events": {"event_id": "1", "event_name": "e", "participant_email": "nia@atlas.com",
                            "event_start": "2023-12-01 09:00:00", "duration": "30"},
        "project_tasks": {"task_id": "1", "task_name": "t", "assigned_to_email": "nia@atlas.com",
                          "list_name": "Backlog",
                          "due_date": "2023-12-01", "board": "Design"},
        "customer_relationship_manager_data": {"customer_id": "1", "customer_name": "c",
                                               "assigned_to_email": "nia@atlas.com", "status": "Lead"},
        "analytics_data": {"date_of_visit": "2023-11-01", "visitor_id": "1", "page_views": "1",
                           "session_duration_seconds": "2", "traffic_source": "direct", "user_engaged": "True"},
        "email_queries_and_answers": {"query": "Delete it", "answer": answer},
    }  # fmt: skip
    for name, row in rows.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            writer.writeheader()
            writer.writerow(row)
    return folder


def test_files_of_workbench_load(tmp_path: Path) -> None:
    tasks = OfficeTasks(path=str(published(tmp_path, "['email.delete_email.func(email_id=\"1\")']")), test_size=0)
    (task,) = tasks.tasks("train")
    assert task.data.calls == [("email_delete_email", {"email_id": "1"})]
    assert played(tasks, task, tasks.gold(task))[-1].reward == 1
    assert played(tasks, task, "Done.")[-1].reward == 0


def with_domains(folder: Path, answer: str, domains: str) -> OfficeTasks:
    published(folder, "[]")
    with (folder / "multi_domain_queries_and_answers.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("query", "answer", "domains"), ("Tell nia", answer, domains)])
    (folder / "email_queries_and_answers.csv").unlink()
    return OfficeTasks(path=str(folder), test_size=0)


def test_requests_about_several_tables_are_read_and_doing_nothing_can_be_right(tmp_path: Path) -> None:
    tasks = with_domains(tmp_path, "[]", "['crm', 'calendar']")
    (task,) = tasks.tasks("train")
    assert task.data.tables == ["customer_relationship_manager", "calendar"]
    assert played(tasks, task, tasks.gold(task))[-1].reward == 1
    for look, reward in (("calendar_search_events", 1), ("email_search_emails", 0)):
        assert played(tasks, task, solution((look, {}), answer="Done."))[-1].reward == reward
    assert played(tasks, task, "Done.")[-1].reward == 0


@pytest.mark.parametrize("domains", ["['crm', 'garden']", "[]", "crm", "3", "[['crm']]"])
def test_requests_about_unknown_tables_are_named(tmp_path: Path, domains: str) -> None:
    with pytest.raises(DataError, match="'Tell nia': column 'domains' must name some of email, calendar"):
        with_domains(tmp_path, "[]", domains).tasks("train")


@pytest.mark.parametrize(
    "call", ["email.burn.func()", "email.delete_email.func(email_id='9')", "email.delete_email.func()", "_row.func()",
             "email.delete_email.func(email_id=[])", "calendar.update_event.func(event_id='1', field=[], new_value='')"]
)  # fmt: skip
def test_calls_that_can_not_be_made_are_named(tmp_path: Path, call: str) -> None:
    with pytest.raises(DataError, match=r"'Tell nia': the call of .* in column 'answer' fails"):
        with_domains(tmp_path, repr([call]), "['crm']").tasks("train")


@pytest.mark.parametrize("answer", ["nothing", "['no call(']", "['f(1, **2)'", "3"])
def test_answers_that_are_not_calls_are_named(tmp_path: Path, answer: str) -> None:
    with pytest.raises(
        DataError, match=r"email_queries_and_answers\.csv: 'Delete it': column 'answer' is not a list of calls"
    ):
        OfficeTasks(path=str(published(tmp_path, answer)), test_size=0).tasks("train")


def test_a_folder_without_the_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no file"):
        OfficeTasks(path=str(tmp_path)).tasks("train")


@pytest.mark.slow
@pytest.mark.skipif("WHET_WORKBENCH" not in os.environ, reason="set WHET_WORKBENCH to a folder with WorkBench's files")
def test_the_right_calls_of_workbench_score_1() -> None:
    tasks = OfficeTasks(path=os.environ["WHET_WORKBENCH"], test_size=80)
    assert len(tasks.tasks("train")) + len(tasks.tasks("test")) >= 480
    graded = asyncio.run(validate(tasks, 1000))
    assert wrong(graded) == []
    assert sum(one.kind == "gold" for one in graded) == len(tasks.tasks("train")) + len(tasks.tasks("test"))
    for task in tasks.tasks("train"):
        if not task.data.calls:
            assert played(tasks, task, "There is nothing to do.")[-1].reward == 0
