{#-
    What a run does when the model's columns and the table's differ: one policy for every materialization that writes a
    part of a table. `on_schema_change` has the meaning that dbt gives it:

    ignore (dbt's default): the columns must be those of the table
    fail: the same
    append_new_columns: new columns are added to the table, and one that the model no longer selects is NULL in new rows,
        or what the table fills it with: its default, an identity column's next number, a generated column's value

    `sync_all_columns` drops columns, which no materialization of ours does; with Merger it adds columns and refuses the
    rest. A type never changes; char and varchar, which
    a table made of a query stores as string, are one type with it: where a table has a length, Delta checks it.
-#}

{% macro schema_change_mode(exposes='table') %}
    {#- The model's `on_schema_change`, checked. A materialization that exposes a view writes whole tables. -#}
    {%- set mode = config.get('on_schema_change') or 'ignore' -%}
    {%- do lakehouse_patterns.require_one_of(
        "on_schema_change of materialized='" ~ config.get('materialized') ~ "'",
        mode,
        ['ignore', 'fail'] + (['append_new_columns'] if exposes == 'table' else [])
    ) -%}
    {{ return(mode) }}
{% endmacro %}


{% macro follow_schema(relation, stored, given, structs={}) %}
    {#-
        Compares and, as the model's `on_schema_change` says, adds. Maps of names to types come in; the table's
        columns and types, the new ones among them, come back. `structs`: {new column: path of a struct of the table that
        gets it too}.
    -#}
    {%- set differences = lakehouse_patterns.allowed_differences(
        relation, stored, given, lakehouse_patterns.schema_change_mode()
    ) -%}
    {{ return(lakehouse_patterns.add_columns(relation, stored, differences.added, structs)) }}
{% endmacro %}


{% macro allowed_differences(relation, stored, given, mode) %}
    {#- As `schema_differences`, of which nothing but new columns is left, and these only where they are appended. -#}
    {%- set differences = lakehouse_patterns.schema_differences(stored, given) -%}
    {%- do lakehouse_patterns.require_no_differences(
        relation, differences.changed if mode == 'append_new_columns' else differences.all
    ) -%}
    {{ return(differences) }}
{% endmacro %}


{% macro schema_differences(stored, given) %}
    {#-
        added: {name: type}; absent: names; and in words: `changed` types, `unlike` (changed and absent) and `all`. Names are
        compared whatever the case of their letters.
    -#}
    {%- set absent, added, changed, unlike = [], {}, [], [] -%}
    {%- for name, type in stored.items() -%}
        {%- set own = lakehouse_patterns.column_name(given, name) -%}
        {%- if own is none -%}
            {%- do absent.append(name) -%}
            {%- do unlike.append('no column ' ~ name) -%}
        {%- elif lakehouse_patterns.stored_type(given[own]) != lakehouse_patterns.stored_type(type) -%}
            {%- do changed.append(name ~ ' as ' ~ given[own] ~ ' in place of ' ~ type) -%}
            {%- do unlike.append(changed[-1]) -%}
        {%- endif -%}
    {%- endfor -%}
    {%- set all = unlike | list -%}
    {%- for name in lakehouse_patterns.names_without_case(given, stored) -%}
        {%- do added.update({name: lakehouse_patterns.stored_type(given[name])}) -%}
        {%- do all.append(name ~ ', which the table lacks') -%}
    {%- endfor -%}
    {{ return({'absent': absent, 'added': added, 'changed': changed, 'unlike': unlike, 'all': all}) }}
{% endmacro %}


{% macro require_no_differences(relation, faults) %}
    {%- do lakehouse_patterns.require(
        not faults,
        'the rows for ' ~ relation ~ ' have ' ~ (faults | join(', '))
        ~ "; select the table's columns, or alter the table first"
    ) -%}
{% endmacro %}


{% macro require_same_columns(relation, stored, given) %}
    {#- Of columns as dbt's adapter describes them. -#}
    {%- do lakehouse_patterns.require_no_differences(relation, lakehouse_patterns.schema_differences(
        lakehouse_patterns.types_of(stored), lakehouse_patterns.types_of(given)
    ).all) -%}
{% endmacro %}


{% macro add_columns(relation, stored, added, structs={}) %}
    {#- Adds columns to a table, in one commit, and returns all that it has then. -#}
    {%- set types, definitions = {}, [] -%}
    {%- do types.update(stored) -%}
    {%- for name, type in added.items() -%}
        {%- do types.update({name: type}) -%}
        {%- set definition = lakehouse_patterns.quoted_name(name) ~ ' ' ~ type -%}
        {%- do definitions.append(definition) -%}
        {%- do definitions.append(structs[name] ~ '.' ~ definition) if name in structs -%}
    {%- endfor -%}
    {%- if definitions -%}
        {%- do lakehouse_patterns.enable_features(relation, added) -%}
        {%- do run_query('alter table ' ~ relation ~ ' add columns (' ~ (definitions | join(', ')) ~ ')') -%}
    {%- endif -%}
    {{ return(types) }}
{% endmacro %}


{% macro features_of(types) %}
    {#- Delta enables a timestamp without time zone by itself in a new table alone. -#}
    {%- for type in types.values() if lakehouse_patterns.holds_type(type, 'timestamp_ntz') -%}
        {{ return({'delta.feature.timestampNtz': 'supported'}) }}
    {%- endfor -%}
    {{ return({}) }}
{% endmacro %}


{% macro enable_features(relation, types) %}
    {#- Enable the table features that columns of these types need, before the existing table gets such columns. -#}
    {%- set features = lakehouse_patterns.features_of(types) -%}
    {%- if features -%}
        {%- set stored = lakehouse_patterns.table_properties(relation) -%}
        {%- if features | reject('in', stored) | list -%}
            {%- do run_query('alter table ' ~ relation ~ ' set ' ~ lakehouse_patterns.property_list(features)) -%}
        {%- endif -%}
    {%- endif -%}
{% endmacro %}


{% macro selected_by_name(stored, given) %}
    {#-
        The table's columns that the model selects, for an `insert … by name`. An absent one is left to the table: NULL
        in its place would replace a default, and be refused by a generated column.
    -#}
    {%- set selected = [] -%}
    {%- for name in stored if lakehouse_patterns.column_name(given, name) is not none -%}
        {%- do selected.append(lakehouse_patterns.quoted_name(name)) -%}
    {%- endfor -%}
    {{ return(selected) }}
{% endmacro %}


{% macro selected_as_stored(stored, given) %}
    {#- The same for a view, with NULL for what the rows lack. -#}
    {%- set selected = [] -%}
    {%- for name, type in stored.items() -%}
        {%- set quoted = lakehouse_patterns.quoted_name(name) -%}
        {%- do selected.append(
            quoted if lakehouse_patterns.column_name(given, name) is not none
            else 'cast(null as ' ~ type ~ ') as ' ~ quoted
        ) -%}
    {%- endfor -%}
    {{ return(selected) }}
{% endmacro %}
