"""An office like WorkBench's (arXiv 2405.00823): tables of mails, meetings, tasks, customers and visits of a website,
and the 27 tools that read and change them."""

import statistics
from collections import Counter
from collections.abc import Callable
from typing import Literal, get_args

from whet.tools.tool import ToolError

Row = dict[str, str]
Tables = dict[str, list[Row]]
NOW = "2023-11-30 00:00:00"
TABLES = ("email", "calendar", "project_management", "customer_relationship_manager", "analytics")
_IDS = dict(zip(TABLES, ("email_id", "event_id", "task_id", "customer_id", "visitor_id"), strict=True))
_SHOWN = 5  # most rows of a search

EmailField = Literal["subject", "sender/recipient", "sent_datetime", "body", "inbox/outbox"]
EventField = Literal["event_name", "participant_email", "event_start", "duration"]
TaskField = Literal["task_name", "assigned_to_email", "list_name", "due_date", "board"]
TaskList = Literal["Backlog", "In Progress", "In Review", "Completed"]
Board = Literal["Back end", "Front end", "Design"]
CustomerField = Literal[
    "customer_name", "assigned_to_email", "customer_email", "customer_phone", "last_contact_date", "product_interest",
    "status", "notes", "follow_up_by",
]  # fmt: skip
CustomerStatus = Literal["Qualified", "Won", "Lost", "Lead", "Proposal"]
Product = Literal["Software", "Hardware", "Services", "Consulting", "Training"]
Metric = Literal["total_visits", "session_duration_seconds", "user_engaged", "visits_direct", "visits_referral",
                 "visits_search_engine", "visits_social_media"]  # fmt: skip
Source = Literal["direct", "referral", "search engine", "social media"]
PlotType = Literal["bar", "line", "scatter", "histogram"]
_ALLOWED = {
    "list_name": get_args(TaskList),
    "board": get_args(Board),
    "status": get_args(CustomerStatus),
    "product_interest": (*get_args(Product), ""),
}


class Office:
    """One episode's copy of the tables. Its public methods are the tools."""

    def __init__(self, tables: Tables) -> None:
        changed = {name: [dict(row) for row in rows] for name, rows in tables.items() if name != "analytics"}
        self._tables: Tables = {**tables, **changed, "plots": []}
        self._first_ids = {name: {row[_IDS[name]] for row in rows} for name, rows in changed.items()}
        self._tables_read = set[str]()
        people = (
            row.get("participant_email") or row.get("assigned_to_email") for rows in tables.values() for row in rows
        )
        self._people = sorted({person for person in people if person})

    def _content(self) -> Counter[tuple[tuple[str, str], ...]]:
        """Return all that tools can change, regardless of letter case, order, and the ids of new rows."""
        rows = Counter[tuple[tuple[str, str], ...]]()
        for name in (*self._first_ids, "plots"):
            for row in self._tables[name]:
                new = name == "plots" or row[_IDS[name]] not in self._first_ids[name]
                kept = {
                    key: value.strip().casefold() for key, value in row.items() if not (new and key == _IDS.get(name))
                }
                rows[("table", name), *sorted(kept.items())] += 1
        return rows

    def _row(self, table: str, row_id: str) -> Row:
        for row in self._tables[table]:
            if row[_IDS[table]] == row_id:
                return row
        raise ToolError(f"there is no {_IDS[table]} {row_id!r}")

    def _read(self, table: str, row_id: str, field: str) -> Row:
        row = {field: self._row(table, row_id)[field]}
        self._tables_read.add(table)
        return row

    def _search(self, table: str, keep: Callable[[Row], bool]) -> list[Row]:
        self._tables_read.add(table)
        return [row for row in self._tables[table] if keep(row)]

    def _add(self, table: str, **values: str) -> str:
        row_id = f"{max((int(row[_IDS[table]]) for row in self._tables[table]), default=0) + 1:08}"
        self._tables[table].append({_IDS[table]: row_id, **self._checked(values)})
        return row_id

    def _update(self, table: str, row_id: str, field: str, value: str) -> None:
        self._row(table, row_id).update(self._checked({field: value}))

    def _delete(self, table: str, row_id: str) -> None:
        self._tables[table].remove(self._row(table, row_id))

    def _checked(self, values: dict[str, str]) -> dict[str, str]:
        for field, value in values.items():
            if field in _ALLOWED and value not in _ALLOWED[field]:
                raise ToolError(f"{field} must be one of {', '.join(_ALLOWED[field])}")
            if field == "assigned_to_email" and value.lower() not in self._people:
                raise ToolError(f"{value!r} is not an address of the company directory")
        return values

    def company_directory_find_email_address(self, name: str) -> list[str]:
        """Return the addresses that contain a name."""
        return [person for person in self._people if name.lower() in person]

    def email_get_email_information_by_id(self, email_id: str, field: EmailField) -> Row:
        """Return a field of a mail."""
        return self._read("email", email_id, field)

    def email_search_emails(self, query: str = "", date_min: str = "", date_max: str = "9999") -> list[Row]:
        """Return the newest 5 mails with all words of the query, from one date (YYYY-MM-DD) to another."""
        words = query.lower().split()
        rows = self._search("email", lambda row: all(word in " ".join(row.values()).lower() for word in words))
        rows = [row for row in rows if date_min[:10] <= row["sent_datetime"][:10] <= date_max[:10]]
        return sorted(rows, key=lambda row: row["sent_datetime"], reverse=True)[:_SHOWN]

    def email_send_email(self, recipient: str, subject: str, body: str) -> None:
        """Send a mail."""
        if "@" not in recipient:
            raise ToolError(f"{recipient!r} is not an address")
        values = {"inbox/outbox": "outbox", "sender/recipient": recipient.lower(), "sent_datetime": NOW}
        self._add("email", **values, subject=subject, body=body)

    def email_reply_email(self, email_id: str, body: str) -> None:
        """Reply to a mail."""
        row = self._row("email", email_id)
        self.email_send_email(row["sender/recipient"], row["subject"], body)

    def email_forward_email(self, email_id: str, recipient: str) -> None:
        """Forward a mail."""
        row = self._row("email", email_id)
        self.email_send_email(recipient, f"FW: {row['subject']}", row["body"])

    def email_delete_email(self, email_id: str) -> None:
        """Delete a mail."""
        self._delete("email", email_id)

    def calendar_get_event_information_by_id(self, event_id: str, field: EventField) -> Row:
        """Return a field of a meeting."""
        return self._read("calendar", event_id, field)

    def calendar_search_events(self, query: str = "", time_min: str = "", time_max: str = "9999") -> list[Row]:
        """Return the first 5 meetings whose name or participant contains the query, from one time (YYYY-MM-DD HH:MM:SS)
        to another."""
        asked = query.lower()
        rows = self._search(
            "calendar", lambda row: asked in row["event_name"].lower() or asked in row["participant_email"].lower()
        )
        rows = [row for row in rows if time_min <= row["event_start"] <= time_max]
        return sorted(rows, key=lambda row: row["event_start"])[:_SHOWN]

    def calendar_create_event(self, event_name: str, participant_email: str, event_start: str, duration: int) -> str:
        """Create a meeting, with its duration in minutes. Returns its id."""
        values = {"participant_email": participant_email.lower(), "event_start": event_start, "duration": str(duration)}
        return self._add("calendar", event_name=event_name, **values)

    def calendar_update_event(self, event_id: str, field: EventField, new_value: str) -> None:
        """Change a field of a meeting."""
        self._update("calendar", event_id, field, new_value)

    def calendar_delete_event(self, event_id: str) -> None:
        """Delete a meeting."""
        self._delete("calendar", event_id)

    def project_management_get_task_information_by_id(self, task_id: str, field: TaskField) -> Row:
        """Return a field of a task."""
        return self._read("project_management", task_id, field)

    def project_management_search_tasks(
        self, task_name: str = "", assigned_to_email: str = "", list_name: str = "", due_date: str = "", board: str = ""
    ) -> list[Row]:
        """Return the tasks whose fields contain what is given."""
        asked = {"task_name": task_name, "assigned_to_email": assigned_to_email, "list_name": list_name}
        return self._matching("project_management", {**asked, "due_date": due_date, "board": board})

    def project_management_create_task(
        self, task_name: str, assigned_to_email: str, list_name: TaskList, due_date: str, board: Board
    ) -> str:
        """Create a task. Returns its id."""
        values = {"assigned_to_email": assigned_to_email.lower(), "list_name": list_name, "due_date": due_date}
        return self._add("project_management", task_name=task_name, **values, board=board)

    def project_management_update_task(self, task_id: str, field: TaskField, new_value: str) -> None:
        """Change a field of a task."""
        self._update("project_management", task_id, field, new_value)

    def project_management_delete_task(self, task_id: str) -> None:
        """Delete a task."""
        self._delete("project_management", task_id)

    def customer_relationship_manager_search_customers(
        self,
        customer_name: str = "",
        customer_email: str = "",
        product_interest: str = "",
        status: str = "",
        assigned_to_email: str = "",
        last_contact_date_max: str = "9999",
    ) -> list[Row]:
        """Return the customers whose fields contain what is given, last spoken to up to a date (YYYY-MM-DD)."""
        asked = {"customer_name": customer_name, "customer_email": customer_email, "product_interest": product_interest}
        rows = self._matching(
            "customer_relationship_manager", {**asked, "status": status, "assigned_to_email": assigned_to_email}
        )
        return [row for row in rows if row["last_contact_date"] <= last_contact_date_max]

    def customer_relationship_manager_add_customer(
        self, customer_name: str, assigned_to_email: str, status: CustomerStatus, product_interest: str = ""
    ) -> str:
        """Add a customer. Returns the id."""
        values = dict.fromkeys(get_args(CustomerField), "") | {"customer_name": customer_name, "status": status}
        values |= {"assigned_to_email": assigned_to_email.lower(), "product_interest": product_interest}
        return self._add("customer_relationship_manager", **values)

    def customer_relationship_manager_update_customer(
        self, customer_id: str, field: CustomerField, new_value: str
    ) -> None:
        """Change a field of a customer."""
        self._update("customer_relationship_manager", customer_id, field, new_value)

    def customer_relationship_manager_delete_customer(self, customer_id: str) -> None:
        """Delete a customer."""
        self._delete("customer_relationship_manager", customer_id)

    def analytics_get_visitor_information_by_id(self, visitor_id: str) -> list[Row]:
        """Return the visits of a visitor."""
        return self._search("analytics", lambda row: row["visitor_id"] == visitor_id)

    def analytics_total_visits_count(self, time_min: str = "", time_max: str = "9999") -> dict[str, int]:
        """Return the number of visits of each day, from one date (YYYY-MM-DD) to another."""
        return Counter(row["date_of_visit"] for row in self._visits(time_min, time_max))

    def analytics_engaged_users_count(self, time_min: str = "", time_max: str = "9999") -> dict[str, int]:
        """Return the number of visits of engaged users of each day."""
        return Counter(
            row["date_of_visit"] for row in self._visits(time_min, time_max) if row["user_engaged"] == "True"
        )

    def analytics_traffic_source_count(
        self, traffic_source: Source, time_min: str = "", time_max: str = "9999"
    ) -> dict[str, int]:
        """Return the number of visits of each day that came from a source."""
        visits = self._visits(time_min, time_max)
        return Counter(row["date_of_visit"] for row in visits if row["traffic_source"] == traffic_source)

    def analytics_get_average_session_duration(self, time_min: str = "", time_max: str = "9999") -> dict[str, float]:
        """Return the average length of visits of each day, in seconds."""
        days = dict[str, list[int]]()
        for row in self._visits(time_min, time_max):
            days.setdefault(row["date_of_visit"], []).append(int(row["session_duration_seconds"]))
        return {day: statistics.fmean(seconds) for day, seconds in days.items()}

    def analytics_create_plot(self, time_min: str, time_max: str, value_to_plot: Metric, plot_type: PlotType) -> str:
        """Plot a value, from one date (YYYY-MM-DD) to another. Returns the file."""
        file = f"plots/{time_min}_{time_max}_{value_to_plot}_{plot_type}.png"
        self._tables["plots"].append({"file": file})
        return file

    def _visits(self, time_min: str, time_max: str) -> list[Row]:
        return self._search("analytics", lambda row: time_min[:10] <= row["date_of_visit"] <= time_max[:10])

    def _matching(self, table: str, asked: Row) -> list[Row]:
        return self._search(table, lambda row: all(part.lower() in row[key].lower() for key, part in asked.items()))[
            :_SHOWN
        ]
