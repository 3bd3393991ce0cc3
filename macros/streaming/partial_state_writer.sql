{#-
    Partial State Writer's table for its two kinds of readers.

    A filter on `is_final` alone isn't enough: when a late event moves the start of a session that was already written,
    the session has another id, and the row of its former id becomes final without events.
-#}

{% macro final_sessions(sessions) %}
    {{ return(adapter.dispatch('final_sessions', 'lakehouse_patterns')(sessions)) }}
{% endmacro %}

{% macro default__final_sessions(sessions) %}
select *
from {{ sessions }}
where is_final and events > 0
{%- endmacro %}


{% macro current_sessions(sessions) %}
    {{ return(adapter.dispatch('current_sessions', 'lakehouse_patterns')(sessions)) }}
{% endmacro %}

{% macro default__current_sessions(sessions) %}
select *
from {{ sessions }}
where events > 0
{%- endmacro %}
