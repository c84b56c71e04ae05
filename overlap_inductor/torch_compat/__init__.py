"""The only place where private torch APIs are touched; every difference between torch 2.11 and 2.15 lives here."""
